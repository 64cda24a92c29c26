#!/bin/bash
if test "$(cat /app/secret.txt)" = heron; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

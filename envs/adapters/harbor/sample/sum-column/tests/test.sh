#!/bin/bash
if test "$(cat /app/total.txt)" = 61; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

#!/bin/bash
if test "$(cat /app/sorted.txt)" = "$(printf '%s\n' 2 9 10 33 100)"; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

#!/bin/bash
if test "$(printf 'a\nb\nc\n' | python3 /app/reverse.py)" = "$(printf 'c\nb\na')"; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

#!/bin/bash
if test -z "$(find /app -name '*.log')" && test "$(cat /app/notes.txt /app/old/keep.txt)" = "$(printf 'notes\nkeep')"; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

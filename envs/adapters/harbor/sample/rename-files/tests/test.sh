#!/bin/bash
if test "$(ls /app/docs | tr '\n' ' ')" = "a.md b.md c.rst " && test "$(cat /app/docs/b.md)" = second; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

#!/bin/bash
if python3 -I -c 'import json; assert json.load(open("/app/merged.json")) == {"x": 1, "y": 7, "z": 4}'; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

#!/bin/bash
if python3 -I -c 'import urllib.request; assert urllib.request.urlopen("http://127.0.0.1:8000/page.txt", timeout=20).read() == b"it works\n"'; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi

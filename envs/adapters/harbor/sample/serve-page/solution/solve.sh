#!/bin/bash
cd /app/site && (python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &) && sleep 2

#!/bin/bash
grep -rh '^SECRET=' /app/maze | cut -d= -f2 >/app/secret.txt

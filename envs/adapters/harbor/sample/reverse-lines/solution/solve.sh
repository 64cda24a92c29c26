#!/bin/bash
printf 'import sys\n\nprint("".join(reversed(sys.stdin.readlines())), end="")\n' >/app/reverse.py

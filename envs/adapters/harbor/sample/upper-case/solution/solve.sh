#!/bin/bash
mkdir -p /app/result && tr a-z A-Z </app/name.txt >/app/result/name.txt

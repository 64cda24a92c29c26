#!/bin/bash
awk -F, 'NR > 1 { sum += $2 } END { print sum }' /app/shop.csv >/app/total.txt

import sys

a, b = map(int, sys.argv[1:])
print(a - b)

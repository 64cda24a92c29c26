#!/bin/bash
find /app -name '*.log' -exec rm {} +

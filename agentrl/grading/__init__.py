"""Grading of answers: exact numbers, formulas and their values, and answers in LaTeX."""

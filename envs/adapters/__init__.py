"""Task sets in other projects' formats, played as environments."""

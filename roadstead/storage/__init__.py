"""Storage: what is kept in S3, and the rules by which it is written and read."""

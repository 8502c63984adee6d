"""Episodes in the formats of others: JSON lines, Parquet, and logs of inspect-ai."""

"""Parts of `benchmarks/papers_findings.py`."""

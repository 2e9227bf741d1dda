"""Examples that run as they stand: `python -m bench.examples.NAME`, at toy sizes in seconds."""

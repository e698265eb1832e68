"""Faults that people who combine FSDP2 with tensor parallelism have met, one test each; see docs/cases.md."""

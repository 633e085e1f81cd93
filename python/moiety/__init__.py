"""Moiety's Python side. Importing it imports nothing else."""

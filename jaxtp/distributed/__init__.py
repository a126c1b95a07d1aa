"""Connects the processes of a run, and ends all of them when one fails."""

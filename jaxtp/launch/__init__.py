"""Starts the processes of one machine; ends all of them when one dies."""

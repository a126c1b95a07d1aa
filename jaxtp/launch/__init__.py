"""Starts the processes of one machine, and ends all of them when one dies; joins those of a cluster."""

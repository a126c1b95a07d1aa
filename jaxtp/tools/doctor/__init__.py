"""Examines this machine, or all processes of a launch: versions, devices, links and folders."""

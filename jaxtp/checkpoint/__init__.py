"""Inspects, verifies and compares checkpoints.

They are Orbax checkpoints that do not depend on the mesh that wrote them.
"""

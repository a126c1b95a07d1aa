"""Explains how a plan splits a model and what that communicates; proposes a plan."""

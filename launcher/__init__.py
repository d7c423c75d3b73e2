"""Multi-process launcher that trains DFlash drafters: every target and every drafter is its own rank."""

__version__ = "0.1.0"

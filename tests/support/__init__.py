"""Factories and doubles that several test files share."""

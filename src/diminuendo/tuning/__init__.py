"""Choosing a schedule and its settings, without or with a cost in privacy."""

"""Generators of tasks by topic; `demo.tasks` names them."""

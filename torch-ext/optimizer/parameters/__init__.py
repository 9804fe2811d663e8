"""Parameters and their options: which options a group accepts, and what is planned from groups."""

"""Parameters and their options: which options a group accepts, and which parameters get Muon."""

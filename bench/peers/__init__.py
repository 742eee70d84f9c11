"""What a user would pick instead. A peer that cannot be imported is reported as absent, with the reason."""

"""What makes up for the groups that were removed."""

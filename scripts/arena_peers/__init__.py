"""What scripts/arena.py runs in processes of their own: nothing here but inputs.py needs tune_prune."""

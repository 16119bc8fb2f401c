"""What a run writes down and shows: metrics, samples, the live view and the report."""

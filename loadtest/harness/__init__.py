"""What every measurement here shares: servers as processes, two load generators, figures to tables."""

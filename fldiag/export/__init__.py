"""Ways in and out of other programs: Flower while it trains, trackers of experiments afterwards."""

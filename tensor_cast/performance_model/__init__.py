"""What ops cost and how long they take: reads traces, knows no torch."""

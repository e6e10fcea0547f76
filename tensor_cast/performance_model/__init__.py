"""What ops cost and how long they take: reads traces, knows no torch."""

# Importing the package registers every cost function, so that no reader finds the registry empty.
from tensor_cast.performance_model import costs as costs

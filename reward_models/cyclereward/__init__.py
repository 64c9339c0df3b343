"""CycleReward: whether a picture and a text could be made from each other."""

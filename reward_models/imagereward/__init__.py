"""ImageReward: human preference between pictures of one prompt."""

"""UnifiedReward: a vision-language model tuned to score pictures and videos, asked over an endpoint."""

"""VideoAlign's VideoReward: visual quality, motion quality and text alignment of videos, judged by Qwen2-VL."""

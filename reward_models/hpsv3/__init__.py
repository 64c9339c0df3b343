"""HPSv3: human preference for pictures of a prompt, judged by Qwen2-VL."""

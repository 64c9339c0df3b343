"""HPSv2 and HPSv2.1: human preference between pictures of one prompt."""

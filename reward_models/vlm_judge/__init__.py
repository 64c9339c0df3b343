"""Any vision-language model as a judge: own question, own way to read the score."""

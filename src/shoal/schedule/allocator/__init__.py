"""What a policy sees and answers, and the programs that policies solve."""

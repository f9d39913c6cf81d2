"""What a response is worth: reward functions and the managers that run them."""

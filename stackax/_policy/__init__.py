"""What the backward pass of a loop keeps."""

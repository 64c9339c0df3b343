"""Whether subject and background of a video stay the same from frame to frame."""

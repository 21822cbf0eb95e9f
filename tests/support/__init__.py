"""What several tests share: tiny real models and the reference they are compared with."""

"""The draft: specialists, and the unroll that trains them."""

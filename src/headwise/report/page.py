"""stub"""
def write_page(profile, path): path.write_text("x")
